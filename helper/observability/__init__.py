"""What the service tells about itself: logs and figures, never anything of one share."""
