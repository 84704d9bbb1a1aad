//! Ways to encode a batch: a method, and the unit that executes it.

use std::fmt;

use crate::batch::Method;

/// Method and the unit that executes it. The receiver only sees the method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// Execution by the thread that has the batch.
    Here(Method),
    /// Deflate by a device ([`crate::accelerator`]). Its cost is the time that the thread spends on handing the batch
    /// over, and on waiting if it has no other work.
    Device,
}

impl Way {
    /// Number of ways.
    pub const COUNT: usize = Method::COUNT + 1;

    /// Returns all ways.
    pub fn all() -> impl Iterator<Item = Self> {
        Method::ALL.into_iter().map(Self::Here).chain([Self::Device])
    }

    /// Returns the index in [`Self::all`].
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Here(method) => method.index(),
            Self::Device => Method::COUNT,
        }
    }

    /// Returns the method, which determines the format.
    #[must_use]
    pub const fn method(self) -> Method {
        match self {
            Self::Here(method) => method,
            Self::Device => Method::Deflate,
        }
    }

    /// Returns the name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Here(method) => method.name(),
            Self::Device => "deflate-device",
        }
    }
}

impl From<Method> for Way {
    fn from(method: Method) -> Self {
        Self::Here(method)
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
