"""Who holds which message, and until when; pure logic without a clock."""
