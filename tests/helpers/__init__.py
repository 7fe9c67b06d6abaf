"""Oracles, strategies and small inputs that several test files share."""
