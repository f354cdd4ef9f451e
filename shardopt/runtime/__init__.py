"""Processes of one job: joined, launched, locked out of each other's folders."""
