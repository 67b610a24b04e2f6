"""Modules on the path of the ranks under the watch; nothing imports them as a package."""
