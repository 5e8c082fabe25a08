"""Several processes as one model: which part each holds, and how they exchange what they computed."""
