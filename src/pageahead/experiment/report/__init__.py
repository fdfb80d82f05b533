"""A page of evidence: one model of what it says, as HTML and as Markdown.

The verdict and every figure come from `gate` and the records; nothing is measured or judged here.
"""
