"""The target model and its properties: loading, dtypes, families, limits of its positions."""
