"""Reuse of computed context: what a block is, which blocks are kept, how much of a prompt they save. Pure host code.

From the bottom up::

    identity  content      everything that changes K and V; the tokens and media of a sequence
    block_hash  fnv        the chained name of a block, for tiers, routers and the reference
    slots  kept_pages      who holds which page, and its generation
    recency  run  tree     kept blocks as a tree of runs, compared token by token
    lookup  reuse_plan     longest usable prefix over all groups of layers
    policy  publish_plan   what a sequence leaves behind
    eviction               what makes room for it
    cargo  host_tier       what goes to the host instead, and comes back
    prefix_image           all that is kept as arrays, for files
    prefix_cache           all of it behind one door
"""
