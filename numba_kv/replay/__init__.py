"""Replay of request traces on the caches of a model: the room behind the ``numba-kv`` command.

Knows traces, a scheduler, figures and pictures. Drives `numba_kv.batch.Batch` through its public calls alone, so whatever a
replay does, a program of yours can do too. Importing the room loads neither NumPy nor Numba.
"""
