"""Servers over several machines, on top of other people's cluster software; today Ray Serve."""
