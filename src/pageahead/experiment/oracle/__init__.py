"""The correctness oracle: bitsandbytes against every strategy, bit for bit.

`case` says what is compared and `matrix` which cases there are; `problem` makes what both sides
are given, `reference` what is to be expected, `bits` and `tolerance` compare; `check` does one
group of cases, `shrink` makes a failing one small; `pool` and `worker` spread groups over
processes; `command` is `pageahead verify`, and `records` and `report` are what it leaves and says.
"""
