"""Carries what ranks on different machines send each other through TLS, in a process beside each rank.

gloo, which connects the ranks, can neither encrypt nor tell who connects. So its sockets stay on loopback addresses,
and the side process carries the bytes of each connection to one fixed port of the other machine.
"""
