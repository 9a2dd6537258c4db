"""What a run leaves behind: metrics, summary, progress."""
