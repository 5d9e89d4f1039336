"""The target model and what is known of it: loading, number formats, families, limits of its positions."""
