"""The what-if app: shows what twin computes, holds no model of its own."""
