"""Recipes, one runnable file each."""
