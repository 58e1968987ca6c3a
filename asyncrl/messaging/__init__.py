"""Messages between processes: a fixed schema over ZeroMQ, no pickle."""
