"""What a job asks for."""
