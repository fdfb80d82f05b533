"""`pageahead bench --preset training`: whole training iterations of a GPT.

`gpt` is the model; `cells` says what is measured and in which ways; `planning` puts the ways into
groups that fit in memory together; `arms` is one way at work, `turns` says when each works;
`determinism` makes iterations repeatable bit for bit; `measure` does one cell in its own process;
`command` asks for all of them, `table` and `plot` show what came out.
"""
