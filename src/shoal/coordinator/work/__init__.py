"""One slot from lease to verdict: assignment, upload, audit draw, verdict, credit. Every function is one transaction."""
