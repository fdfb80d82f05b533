"""Moving chunks past the compute stream."""

from pageahead.pipeline.pipeline import Pipeline, Plan

__all__ = ["Pipeline", "Plan"]
