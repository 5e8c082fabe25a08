"""Vision towers: Transformers' modules with everything computed before the forward, run as encoder graphs."""
