"""`pageahead doctor`: what this machine can do, how fast, and which settings follow from that."""
