"""Comparing what ranks have: do replicas agree, and do data ranks differ?"""
