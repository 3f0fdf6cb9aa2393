"""The contracts as documents for other programs: JSON Schema and AsyncAPI. `python -m common.schemas` writes them."""
