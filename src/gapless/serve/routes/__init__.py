"""One file per group of endpoints; each has ``add_routes(app, context)``."""
