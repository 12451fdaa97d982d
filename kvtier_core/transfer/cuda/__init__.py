"""Copies between pages in a GPU's memory and page-locked slots. Importing this package loads nothing heavy."""
