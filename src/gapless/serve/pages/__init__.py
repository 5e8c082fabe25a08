"""The parts of self-contained HTML pages, put together and served by ``serve/dashboard.py``. They may load
nothing from anywhere else."""
