"""Warnings about slips in the program of a user, each given once per place."""
