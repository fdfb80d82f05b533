"""`pageahead slurm`: the other commands as Slurm jobs, one for each kind of device.

A folder that all nodes see holds everything: evidence, logs, and `jobs.jsonl`, which says what was
submitted and how it ended. Each job also keeps a journal of its own there, so that no two hosts
write to one file, and so that a job is understood where Slurm has forgotten it.
"""
