//! What there is to choose among: a method, and who carries it out.

use std::fmt;

use crate::batch::Method;

/// A method, and who carries it out. The receiver sees the method alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// The thread that has the batch.
    Here(Method),
    /// Deflate by a device beside the processor ([`crate::accelerator`]). What it takes is what the thread spends on it, to
    /// hand it over, and to wait where it has nothing else to do.
    Device,
}

impl Way {
    /// How many there are.
    pub const COUNT: usize = Method::COUNT + 1;

    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        Method::ALL.into_iter().map(Self::Here).chain([Self::Device])
    }

    /// Its place in [`Self::all`].
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Here(method) => method.index(),
            Self::Device => Method::COUNT,
        }
    }

    /// What comes out.
    #[must_use]
    pub const fn method(self) -> Method {
        match self {
            Self::Here(method) => method,
            Self::Device => Method::Deflate,
        }
    }

    /// As it is called in reports.
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
