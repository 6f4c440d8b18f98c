"""What the daemon tells about itself: log lines, metrics, health. Decides nothing."""
