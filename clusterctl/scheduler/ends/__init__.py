"""Why a job ended or waits."""
