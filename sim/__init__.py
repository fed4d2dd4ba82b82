"""The simulator: policies decide, a driver carries out, tables tell."""
