//! The files of a disk, held open with QEMU's locks across restarts of its server.
//!
//! Between the death of a server and the start of the next one, the image has no lock of either, while its guest
//! keeps running. A program that opened it for writing in that time would damage it. So the process that starts the
//! servers holds the locks as well. No lock prevents that a file is moved or deleted. That is checked before a server
//! is restarted, which must not serve another file in its place.

use std::fmt::Write;

use larder_block::backend::file::{LockedFile, PathChange};

use crate::image::ImageAddress;

/// The files of one disk that are on this host: its image, and the files that the image refers to, up to an NBD
/// server.
#[derive(Debug)]
pub struct DiskLocks {
    /// The disk's image.
    pub image: ImageAddress,
    pub(super) files: Vec<LockedFile>,
}

impl DiskLocks {
    pub(super) fn new(image: &ImageAddress) -> Self {
        Self { image: image.clone(), files: Vec::new() }
    }

    /// Returns the reason why a server would not find the same files, with advice. A path that cannot be resolved is
    /// not reported here, because the server reports it.
    pub(super) fn obstacle(&self) -> Option<String> {
        let mut text = String::new();
        for file in &self.files {
            let Ok(Some(displaced)) = file.path_change() else {
                continue;
            };
            let (path, contents) = (file.path().display(), file.content_path());
            let separator = if text.is_empty() { "" } else { "; " };
            // Writing to a string cannot fail.
            let _ = match displaced {
                PathChange::Moved => {
                    // The current name of the file, if it has one; otherwise its path in /proc.
                    let name = std::fs::read_link(&contents).ok().filter(|name| name.exists());
                    let name = name.unwrap_or(contents);
                    write!(
                        text,
                        "{separator}{path} no longer leads to the guest's file: put {} back there",
                        name.display()
                    )
                }
                PathChange::Removed => write!(
                    text,
                    "{separator}{path} was deleted or replaced: copy {} if it is needed, and end the guest",
                    contents.display()
                ),
            };
        }
        (!text.is_empty()).then_some(text)
    }
}
