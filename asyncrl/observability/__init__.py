"""What a run tells about itself: metrics, waits, what each process is doing, signals and hangs."""
