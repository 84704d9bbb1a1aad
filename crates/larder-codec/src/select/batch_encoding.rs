//! Ways to encode a batch: a method, and the unit that executes it.

use std::fmt;

use crate::batch::Method;

/// Method and the unit that executes it. The receiver only sees the method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BatchEncoding {
    /// Execution by the thread that has the batch.
    Cpu(Method),
    /// Deflate by a device ([`crate::accelerator`]). Its cost is the time that the thread spends on handing the batch
    /// over, and on waiting if it has no other work.
    Device,
}

impl BatchEncoding {
    /// Number of ways.
    pub const COUNT: usize = Method::COUNT + 1;

    /// Returns all ways.
    pub fn all() -> impl Iterator<Item = Self> {
        Method::ALL.into_iter().map(Self::Cpu).chain([Self::Device])
    }

    /// Returns the index in [`Self::all`].
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Cpu(method) => method.index(),
            Self::Device => Method::COUNT,
        }
    }

    /// Returns the method, which determines the format.
    #[must_use]
    pub const fn method(self) -> Method {
        match self {
            Self::Cpu(method) => method,
            Self::Device => Method::Deflate,
        }
    }

    /// Returns the name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu(method) => method.name(),
            Self::Device => "deflate-device",
        }
    }
}

impl From<Method> for BatchEncoding {
    fn from(method: Method) -> Self {
        Self::Cpu(method)
    }
}

impl fmt::Display for BatchEncoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
