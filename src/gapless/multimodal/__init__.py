"""Images and videos in prompts: loading, preparing, and what stands for them in a batch."""
