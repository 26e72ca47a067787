"""Lets devices on a network find each other, and says why they do not."""
