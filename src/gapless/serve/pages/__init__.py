"""Self-contained HTML pages, one file each, served as they are. A page file here is served by a route in
``routes/``; it may load nothing from anywhere else."""
