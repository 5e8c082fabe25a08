"""What requests may say: one pydantic model per endpoint, every field checked or refused by name."""
