"""What a run leaves behind: identity, writing, reading. Standard library; numpy for samples."""
