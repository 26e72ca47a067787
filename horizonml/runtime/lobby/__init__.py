"""Gathers devices before a run, gives them their ranks, and lets them come and go: `horizonml up` and `join`."""
