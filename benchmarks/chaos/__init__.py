"""Runs a job on this machine while ranks are killed, paused, cut off and starved, and measures what that costs."""
