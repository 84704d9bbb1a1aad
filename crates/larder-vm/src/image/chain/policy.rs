//! Policy for the files that may be opened for an image besides itself. A name in the image's header is never
//! sufficient, because the author of the image chose it.

use std::fmt::Write;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use larder_block::opener::{self, open_safe_path};
use larder_block::printable;
use nix::unistd::{Gid, Group, Uid, User};

use super::{ChainPart, PartRole};
use crate::image::{Format, ImageAddress};

/// One image of a chain of backing files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainImage {
    /// Address of the image.
    pub image: ImageAddress,
    /// Format of the image.
    pub format: Format,
    /// External data file of the image, which is raw.
    pub data_file: Option<ImageAddress>,
}

/// The only files that an image may lead to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PinnedChain {
    /// External data file of the image itself.
    pub data_file: Option<ImageAddress>,
    /// Its backing file, the backing file of that one, and so on.
    pub backing: Vec<ChainImage>,
}

/// Source of a pinned chain, for error messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PinnedBy {
    /// The VM's file.
    VmFile,
    /// A file given with `--pin-chain`.
    ChainFile(PathBuf),
    /// `--backing-chain none`.
    NoChain,
}

/// Treatment of the files that an image's header names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChainPolicy {
    /// The files are opened with the caller's rights, as QEMU does. For an image of another user, or through a
    /// symbolic link of another user, root opens them only if it trusts that user.
    Follow {
        /// Root trusts the authors of other users' images, and the owners of links.
        trust_image: bool,
    },
    /// Only the pinned files are opened, and the header must name the same ones.
    Pinned {
        /// The pinned files.
        chain: Arc<PinnedChain>,
        /// Source of the pinned chain.
        by: PinnedBy,
    },
}

/// Reason why a chain is refused.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ChainError {
    #[error(
        "{image}: its header names the backing file '{}'{}, which {}{}",
        printable(name),
        format_suffix(*format),
        denial(by),
        permission_hint(by, lines)
    )]
    Backing { image: String, name: String, format: Option<Format>, by: PinnedBy, lines: String },
    #[error(
        "{image}: its header names the external data file '{}', which {}{}",
        printable(name),
        denial(by),
        permission_hint(by, lines)
    )]
    DataFile { image: String, name: String, by: PinnedBy, lines: String },
    #[error(
        "{image}: its header gives the backing file '{}' the format {}, but {} gives {}",
        printable(name),
        header.name(),
        source_name(by),
        pinned.name()
    )]
    Format { image: String, name: String, header: Format, pinned: Format, by: PinnedBy },
    #[error(
        "{image}: {author}, and its header would make root open '{}'; if that file is correct, confirm it with --trust-image, or do \
         this as another user",
        printable(name)
    )]
    Author { image: String, name: String, author: Author },
    #[error(
        "{image}: its header would make root open '{}', but root does not follow every link: {}; if that file is correct, \
         confirm it with --trust-image, or do this as another user",
        printable(name),
        printable(&source.to_string())
    )]
    Link { image: String, name: String, source: io::Error },
    #[error(
        "{image}: its header names no {what}, but {} names '{}'{}",
        source_name(by),
        printable(name),
        permission_hint(by, lines)
    )]
    NotNamed { image: String, what: &'static str, name: String, by: PinnedBy, lines: String },
}

fn format_suffix(format: Option<Format>) -> String {
    format.map_or_else(String::new, |format| format!(" of format {}", format.name()))
}

fn source_name(by: &PinnedBy) -> String {
    match by {
        PinnedBy::VmFile => "the VM's file".to_owned(),
        PinnedBy::ChainFile(path) => path.display().to_string(),
        PinnedBy::NoChain => "--backing-chain none".to_owned(),
    }
}

fn denial(by: &PinnedBy) -> String {
    match by {
        PinnedBy::NoChain => "--backing-chain none does not allow".to_owned(),
        by => format!("{} does not name", source_name(by)),
    }
}

fn permission_hint(by: &PinnedBy, lines: &str) -> String {
    match by {
        PinnedBy::VmFile => format!("; if the header is correct, the VM's file needs for this disk: {lines}"),
        PinnedBy::ChainFile(path) => {
            let path = path.display();
            format!(
                "; if the header is correct, remove {path}, which the next start creates again, or change {path} to: {lines}"
            )
        }
        PinnedBy::NoChain => String::new(),
    }
}

/// The author of an image: anyone who may have chosen the content of its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Author {
    /// The file belongs to this user.
    User(u32),
    /// Any user may write to the file.
    AnyUser,
    /// The members of this group may write to the file, or users whom its access control list names.
    Group(u32),
    /// The image is on a block device, and its format was probed: a guest that had the device as a raw disk could
    /// have written the header.
    Guest,
    /// The image comes from an NBD server.
    Server,
}

impl Author {
    /// Returns the author of a file on this host; `is_probed` means that its format was probed.
    pub(in crate::image) fn from_file(file: &Metadata, is_probed: bool) -> Self {
        let is_device = file.file_type().is_block_device();
        // The members of the group of all disks can change any file of root on them.
        let is_group_writable = || file.mode() & 0o020 != 0 && !(is_device && is_disk_group(file.gid()));
        match file.uid() {
            _ if is_device && is_probed => Self::Guest,
            _ if file.mode() & 0o002 != 0 => Self::AnyUser,
            0 if is_group_writable() => Self::Group(file.gid()),
            user => Self::User(user),
        }
    }

    /// Returns the author of the image at this address, if this process runs as root and does not follow names from
    /// that author.
    pub fn untrusted(image: &ImageAddress) -> Option<Self> {
        let author = match image {
            // A file that cannot be accessed may have any author.
            ImageAddress::Path(path) => {
                opener::metadata(path).map_or(Self::AnyUser, |found| Self::from_file(&found, false))
            }
            ImageAddress::Nbd(_) => Self::Server,
        };
        (rustix::process::geteuid().is_root() && !author.is_root()).then_some(author)
    }

    /// Returns whether only root can have chosen the content.
    fn is_root(self) -> bool {
        self == Self::User(0)
    }
}

impl std::fmt::Display for Author {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::User(number) => match User::from_uid(Uid::from_raw(*number)).ok().flatten() {
                Some(user) => write!(f, "it belongs to user {}", user.name),
                None => write!(f, "it belongs to user {number}"),
            },
            Self::AnyUser => f.write_str("any user may write to it"),
            Self::Group(number) => match Group::from_gid(Gid::from_raw(*number)).ok().flatten() {
                Some(group) => write!(f, "users of group {} may write to it", group.name),
                None => write!(f, "users of group {number} may write to it"),
            },
            Self::Guest => f.write_str(
                "it is on a block device and its format was not given, so a guest may have written its header",
            ),
            Self::Server => f.write_str("it comes from an NBD server"),
        }
    }
}

/// Returns whether this is the group to which the distributions give the host's disks.
fn is_disk_group(number: u32) -> bool {
    let group = Group::from_gid(Gid::from_raw(number)).ok().flatten();
    group.is_some_and(|group| group.name == "disk")
}

/// Reference in a header: the file and its format.
pub(super) struct HeaderReference<'a> {
    pub(super) name: &'a str,
    pub(super) address: ImageAddress,
    pub(super) format: Option<Format>,
}

impl Default for ChainPolicy {
    fn default() -> Self {
        Self::FOLLOW
    }
}

impl ChainPolicy {
    /// Opens named files with the caller's rights, and trusts no other user's image as root.
    pub const FOLLOW: Self = Self::Follow { trust_image: false };

    /// Returns the backing file to open for the image that is `depth` images below the first one, and its format if
    /// that is known. `author` is the author of the header of `image`.
    ///
    /// # Errors
    /// The header names no file where one is pinned, or another file than the pinned one, or its author is not
    /// trusted.
    pub(super) fn backing(
        &self,
        (image, author): (&ImageAddress, Author),
        depth: usize,
        named: Option<HeaderReference<'_>>,
    ) -> Result<Option<(ImageAddress, Option<Format>)>, ChainError> {
        let (chain, by) = match self {
            Self::Pinned { chain, by } => (chain, by),
            Self::Follow { trust_image } => {
                if let Some(HeaderReference { name, address, .. }) = &named {
                    check_author((image, author), name, address, *trust_image)?;
                }
                return Ok(named.map(|named| (named.address, named.format)));
            }
        };
        match (named, chain.backing.get(depth)) {
            (None, None) => Ok(None),
            (None, Some(pinned)) => Err(ChainError::NotNamed {
                image: image.to_string(),
                what: "backing file",
                name: pinned.image.to_string(),
                by: by.clone(),
                lines: NamedChain::from(chain.as_ref()).with_backing(depth, None).lines(),
            }),
            (Some(named), Some(pinned)) if is_same_reference(&pinned.image, &named.address) => match named.format {
                Some(header) if header != pinned.format => Err(ChainError::Format {
                    image: image.to_string(),
                    name: named.name.to_owned(),
                    header,
                    pinned: pinned.format,
                    by: by.clone(),
                }),
                _ => Ok(Some((pinned.image.clone(), Some(pinned.format)))),
            },
            (Some(named), _) => {
                // A relative path in the pinning file is relative to that file.
                let actual = NamedImage { image: named.address.absolute(), format: named.format, data_file: None };
                Err(ChainError::Backing {
                    image: image.to_string(),
                    name: named.name.to_owned(),
                    format: named.format,
                    by: by.clone(),
                    lines: NamedChain::from(chain.as_ref()).with_backing(depth, Some(actual)).lines(),
                })
            }
        }
    }

    /// Returns the external data file to open for the image that is `depth` images below the first one.
    ///
    /// # Errors
    /// See [`ChainPolicy::backing`].
    pub(super) fn data_file(
        &self,
        (image, author): (&ImageAddress, Author),
        depth: usize,
        named: Option<HeaderReference<'_>>,
    ) -> Result<Option<ImageAddress>, ChainError> {
        let (chain, by) = match self {
            Self::Pinned { chain, by } => (chain, by),
            Self::Follow { trust_image } => {
                if let Some(HeaderReference { name, address, .. }) = &named {
                    check_author((image, author), name, address, *trust_image)?;
                }
                return Ok(named.map(|named| named.address));
            }
        };
        let pinned = match depth.checked_sub(1) {
            None => chain.data_file.as_ref(),
            Some(index) => chain.backing.get(index).and_then(|backing| backing.data_file.as_ref()),
        };
        match (named, pinned) {
            (None, None) => Ok(None),
            (None, Some(pinned)) => Err(ChainError::NotNamed {
                image: image.to_string(),
                what: "external data file",
                name: pinned.to_string(),
                by: by.clone(),
                lines: NamedChain::from(chain.as_ref()).with_data_file(depth, None).lines(),
            }),
            (Some(named), Some(pinned)) if is_same_reference(pinned, &named.address) => Ok(Some(pinned.clone())),
            (Some(named), _) => Err(ChainError::DataFile {
                image: image.to_string(),
                name: named.name.to_owned(),
                by: by.clone(),
                lines: NamedChain::from(chain.as_ref()).with_data_file(depth, Some(named.address.absolute())).lines(),
            }),
        }
    }
}

/// Checks that the `author` of the header of `image` may choose a file that this process opens, and that no link of
/// another user leads to that file. The header has `name` for the file at `address`. A relative name starts in the
/// directory of the image's path, which the user may have chosen by a link to the image.
///
/// # Errors
/// The process is root, and trusts neither other users' images nor their links.
pub fn check_author(
    (image, author): (&ImageAddress, Author),
    name: &str,
    address: &ImageAddress,
    trust_image: bool,
) -> Result<(), ChainError> {
    if trust_image || !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    if !author.is_root() {
        return Err(ChainError::Author { image: image.to_string(), name: name.to_owned(), author });
    }
    match address {
        ImageAddress::Path(path) => match open_safe_path(path) {
            // The host's own errors are reported when the file is opened.
            Err(source) if source.raw_os_error().is_none() => {
                Err(ChainError::Link { image: image.to_string(), name: name.to_owned(), source })
            }
            _ => Ok(()),
        },
        ImageAddress::Nbd(_) => Ok(()),
    }
}

/// Files that the headers of an image and of its backing files name. A format that no header gives is unknown: only
/// the user can supply it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedChain {
    /// External data file of the image itself.
    pub data_file: Option<ImageAddress>,
    /// Its backing file, the backing file of that one, and so on.
    pub backing: Vec<NamedImage>,
}

/// A backing file, as the header of the overlay names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedImage {
    /// Address of the backing file.
    pub image: ImageAddress,
    /// Format of the backing file, if the overlay's header gives it.
    pub format: Option<Format>,
    /// External data file that the backing file's own header names.
    pub data_file: Option<ImageAddress>,
}

impl From<&PinnedChain> for NamedChain {
    fn from(chain: &PinnedChain) -> Self {
        let backing = chain.backing.iter().map(|image| NamedImage {
            image: image.image.clone(),
            format: Some(image.format),
            data_file: image.data_file.clone(),
        });
        Self { data_file: chain.data_file.clone(), backing: backing.collect() }
    }
}

impl NamedChain {
    /// Returns whether the chain is the image alone.
    pub fn is_empty(&self) -> bool {
        self.data_file.is_none() && self.backing.is_empty()
    }

    /// Returns the pinned chain that allows these files; `None` if a format is missing.
    pub fn pinned(&self) -> Option<PinnedChain> {
        let backing: Option<Vec<ChainImage>> = self
            .backing
            .iter()
            .map(|named| {
                Some(ChainImage {
                    image: named.image.clone(),
                    format: named.format?,
                    data_file: named.data_file.clone(),
                })
            })
            .collect();
        Some(PinnedChain { data_file: self.data_file.clone(), backing: backing? })
    }

    /// Returns whether `chain` allows exactly these files.
    pub fn is_allowed_by(&self, chain: &PinnedChain) -> bool {
        let same = |one: Option<&ImageAddress>, other: Option<&ImageAddress>| match (one, other) {
            (Some(one), Some(other)) => is_same_reference(other, one),
            (one, other) => one == other,
        };
        let backing = self.backing.iter().zip(&chain.backing);
        same(self.data_file.as_ref(), chain.data_file.as_ref())
            && self.backing.len() == chain.backing.len()
            && backing.into_iter().all(|(named, pinned)| {
                is_same_reference(&pinned.image, &named.image)
                    && named.format.is_none_or(|format| format == pinned.format)
                    && same(named.data_file.as_ref(), pinned.data_file.as_ref())
            })
    }

    /// Returns the chain that ends with `backing` at `depth`.
    fn with_backing(mut self, depth: usize, backing: Option<NamedImage>) -> Self {
        self.backing.truncate(depth);
        self.backing.extend(backing);
        self
    }

    fn with_data_file(mut self, depth: usize, data_file: Option<ImageAddress>) -> Self {
        match depth.checked_sub(1) {
            None => self.data_file = data_file,
            Some(index) => {
                if let Some(backing) = self.backing.get_mut(index) {
                    backing.data_file = data_file;
                }
            }
        }
        self
    }

    /// Returns the keys that describe the chain in a VM's file, or in one for `--pin-chain`, with their values in
    /// TOML syntax. A missing format becomes a question mark, which such a file does not accept.
    pub fn keys(&self) -> Vec<(&'static str, String)> {
        let mut keys = Vec::new();
        if let Some(data_file) = &self.data_file {
            keys.push(("data-file", toml_string(&data_file.to_string())));
        }
        if !self.backing.is_empty() {
            let all: Vec<String> = self.backing.iter().map(toml_table).collect();
            keys.push(("backing", format!("[{}]", all.join(", "))));
        }
        keys
    }

    /// Returns the named files.
    pub fn files(&self) -> impl Iterator<Item = &ImageAddress> {
        let backing = self.backing.iter().flat_map(|image| [Some(&image.image), image.data_file.as_ref()]);
        std::iter::once(self.data_file.as_ref()).chain(backing).flatten()
    }

    /// Returns the first path that is not UTF-8: no TOML file can hold it.
    pub fn path_not_utf8(&self) -> Option<&Path> {
        self.files().find_map(ImageAddress::path_not_utf8)
    }

    /// Returns the keys as lines of TOML.
    pub fn lines(&self) -> String {
        if let Some(path) = self.path_not_utf8() {
            return format!("(not possible: {})", not_utf8_message(path));
        }
        let keys = self.keys().into_iter();
        let mut lines: Vec<String> = keys.map(|(key, value)| format!("{key} = {value}")).collect();
        if self.backing.iter().any(|image| image.format.is_none()) {
            lines
                .push("with raw or qcow2 in place of the question mark, because no header gives the format".to_owned());
        }
        match lines.as_slice() {
            [] => "no data-file and no backing".to_owned(),
            lines => lines.join("\n"),
        }
    }
}

/// Returns the reason why a path cannot be written into a VM's file, or one for `--pin-chain`, and what to do.
pub fn not_utf8_message(path: &Path) -> String {
    format!(
        "the path '{}' is not UTF-8, and such a file holds UTF-8 only; rename the file, or the directory whose name is not UTF-8",
        printable(&path.to_string_lossy())
    )
}

/// Returns whether the `named` file of a header is the pinned one. The comparison is textual: a path from a header is
/// not looked up before it is allowed, and the pinned path is the one that is opened.
fn is_same_reference(pinned: &ImageAddress, named: &ImageAddress) -> bool {
    match (named, pinned) {
        (ImageAddress::Path(named), ImageAddress::Path(pinned)) => normalize(named) == normalize(pinned),
        (named, pinned) => named == pinned,
    }
}

/// Returns an absolute path without `.`, and without `..` after a name.
fn normalize(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut normalized = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                normalized.pop();
            }
            part => normalized.push(part),
        }
    }
    normalized
}

/// Returns the lines that describe an image and its chain in a VM's file, or in one for `--pin-chain`.
pub fn chain_text(image: &ChainImage, chain: &PinnedChain) -> String {
    let mut text =
        format!("image = {}\nformat = {}\n", toml_string(&image.image.to_string()), toml_string(image.format.name()));
    for (key, value) in NamedChain::from(chain).keys() {
        let _ = writeln!(text, "{key} = {value}");
    }
    text
}

/// Returns the chain of an open disk in the form in which it is pinned: with absolute paths.
pub fn pinned_chain(parts: &[ChainPart]) -> PinnedChain {
    let mut chain = PinnedChain::default();
    for part in parts {
        let image = part.image.absolute();
        match part.role {
            PartRole::Image => {}
            PartRole::DataFile => match chain.backing.last_mut() {
                Some(backing) => backing.data_file = Some(image),
                None => chain.data_file = Some(image),
            },
            PartRole::Backing => chain.backing.push(ChainImage { image, format: part.format, data_file: None }),
        }
    }
    chain
}

fn toml_table(image: &NamedImage) -> String {
    let data_file = image
        .data_file
        .as_ref()
        .map_or_else(String::new, |data_file| format!(", data-file = {}", toml_string(&data_file.to_string())));
    format!(
        "{{ image = {}, format = {}{data_file} }}",
        toml_string(&image.image.to_string()),
        toml_string(image.format.map_or("?", Format::name))
    )
}

/// Returns the text as a basic string of TOML.
pub(crate) fn toml_string(text: &str) -> String {
    let mut quoted = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' | '\\' => quoted.extend(['\\', letter]),
            letter if letter.is_control() => {
                let _ = write!(quoted, "\\u{:04X}", u32::from(letter));
            }
            letter => quoted.push(letter),
        }
    }
    quoted + "\""
}
