"""Measurements from the inside: real workers over real sockets, without Ray.

The one part of loadtest that knows the packages; what users see is measured from the outside, next door.
"""
