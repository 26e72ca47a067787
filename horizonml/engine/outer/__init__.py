"""Implements local steps: how members synchronise their parameters every so many steps, and what they send for that."""
