"""Fields that several front ends read: of chats, tools, beams and forms, with the limits of their entries."""
