//! The files of a disk, kept open with QEMU's locks while servers come and go.
//!
//! Between the death of a server and the start of the next one the image has no lock of either, while its guest lives
//! on. Whoever opened it for writing then would damage it. So the process that starts the servers has the locks, too.
//! What no lock prevents, that a file is moved or deleted, is found out before a server is started again: it must not
//! serve whatever is there instead.

use std::fmt::Write;

use larder_block::backend::file::{Displaced, HeldFile};

use crate::image::ImageAddress;

/// The files of one disk that are on this host: its image, and what that refers to, up to an NBD server.
#[derive(Debug)]
pub struct Hold {
    /// The disk's image.
    pub image: ImageAddress,
    pub(super) files: Vec<HeldFile>,
}

impl Hold {
    pub(super) fn new(image: &ImageAddress) -> Self {
        Self {
            image: image.clone(),
            files: Vec::new(),
        }
    }

    /// What keeps a server from finding the same files: what has happened, and what to do. A path that cannot be
    /// followed is left to the server to complain about.
    pub(super) fn obstacle(&self) -> Option<String> {
        let mut text = String::new();
        for file in &self.files {
            let Ok(Some(displaced)) = file.displaced() else {
                continue;
            };
            let (path, contents) = (file.path().display(), file.contents());
            let separator = if text.is_empty() { "" } else { "; " };
            // Writing to a string cannot fail.
            let _ = match displaced {
                Displaced::Moved => {
                    // Its name, unless that is one that it has lost.
                    let name = std::fs::read_link(&contents).ok().filter(|name| name.exists());
                    let name = name.unwrap_or(contents);
                    write!(
                        text,
                        "{separator}{path} no longer leads to the guest's file: put {} back there",
                        name.display()
                    )
                }
                Displaced::Removed => write!(
                    text,
                    "{separator}{path} was deleted or replaced: copy {} if it is needed, and end the guest",
                    contents.display()
                ),
            };
        }
        (!text.is_empty()).then_some(text)
    }
}
