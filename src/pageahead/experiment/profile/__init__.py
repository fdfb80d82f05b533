"""What a step does when: transfers, updates, waits and page faults, with their times.

`measure` runs one arm of a cell in a process of its own while a collector listens: `cupti` on a
GPU, `cpu` without one. `nsys` reads what Nsight Systems recorded instead. All of them give the same
`activity.Activity`, from which `analysis` computes, `trace` and `picture` draw and the gate judges.
"""
