"""What tests share: problems, single-device references, rows that cover every pair."""
