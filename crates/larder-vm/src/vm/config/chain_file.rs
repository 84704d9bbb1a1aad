//! Pinned chains as users write them: `backing` and `data-file` of a VM's file, and the file for `larder disk serve
//! --pin-chain`.

use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use larder_block::printable;
use larder_block::small_file::{self, CONFIG_BYTES_MAX};
use toml::de::{DeTable, DeValue};

use super::{ConfigError, ConfigParser, Value, parse_format, parse_image};
use crate::image::{
    ChainImage, ChainPart, Format, ImageAddress, NamedChain, PinnedChain, format_chain_journals, not_utf8_message,
    pinned_chain,
};

/// Example of the syntax of backing files.
const BACKING_EXAMPLE: &str = "backing = [{ image = \"/srv/base.qcow2\", format = \"qcow2\" }]";

/// Content of a file for `--pin-chain`: an image, and the files that it leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainFile {
    /// Address of the image.
    pub image: ImageAddress,
    /// Format of the image.
    pub format: Format,
    /// The other files.
    pub chain: PinnedChain,
}

impl ChainFile {
    /// Reads a chain file; `None` if it does not exist.
    ///
    /// # Errors
    /// See [`ConfigError`]. A file that another user than the caller or root could have written is refused.
    pub fn read(path: &Path) -> Result<Option<Self>, ConfigError> {
        let text = match read_trusted(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => {
                return Err(ConfigError::Read { path: path.to_owned(), source });
            }
        };
        let mut reader = ConfigParser { path, text: &text, mistakes: Vec::new() };
        let found = match DeTable::parse(&text) {
            Ok(table) => reader.parse_chain_file(table.get_ref()),
            Err(error) => {
                reader.add_mistake(&error.span().unwrap_or(0..0), error.message());
                None
            }
        };
        let mistakes = reader.mistakes;
        match found {
            Some(found) if mistakes.is_empty() => Ok(Some(found)),
            _ => Err(ConfigError::Mistakes { mistakes }),
        }
    }

    /// Returns the chain file for an open disk; `None` if it has no image.
    pub fn from_parts(parts: &[ChainPart]) -> Option<Self> {
        let image = parts.first()?;
        Some(Self { image: image.image.absolute(), format: image.format, chain: pinned_chain(parts) })
    }

    /// Describes the files other than the image, one per line: role, format, and whether it may be written.
    pub fn describe_files(&self, read_only: bool) -> Vec<String> {
        let access = if read_only { "read" } else { "read and written" };
        let data_file = |file: &Option<ImageAddress>, access: &str| {
            let file = file.as_ref()?;
            Some(format!("data file {}, raw, {access}", printable(&file.to_string())))
        };
        let mut lines: Vec<String> = data_file(&self.chain.data_file, access).into_iter().collect();
        for backing in &self.chain.backing {
            lines.push(format!(
                "backing file {}, {}, read",
                printable(&backing.image.to_string()),
                backing.format.name()
            ));
            lines.extend(data_file(&backing.data_file, "read"));
        }
        lines
    }

    /// Writes the chain file, durably and atomically. An existing file is not replaced.
    ///
    /// # Errors
    /// Writing fails, a file exists at `path`, or a path of the chain is not UTF-8: the file would name another one.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let named = NamedChain::from(&self.chain);
        if let Some(path) = self.image.path_not_utf8().or_else(|| named.path_not_utf8()) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, not_utf8_message(path)));
        }
        let path = std::path::absolute(path)?;
        let directory = path.parent().unwrap_or(Path::new("/"));
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.new", std::process::id()));
        let new = directory.join(name);
        let written = self.write_new(&new);
        let written = written.and_then(|()| {
            let (cwd, flags) = (rustix::fs::CWD, rustix::fs::RenameFlags::NOREPLACE);
            rustix::fs::renameat_with(cwd, &new, cwd, &path, flags).map_err(io::Error::from)
        });
        if written.is_err() {
            // The temporary file may not exist.
            let _ = fs::remove_file(&new);
        }
        written?;
        File::open(directory)?.sync_all()
    }

    fn write_new(&self, path: &Path) -> io::Result<()> {
        let mut options = File::options();
        let mut file = options.write(true).create_new(true).mode(0o600).open(path)?;
        file.write_all(self.to_toml().as_bytes())?;
        file.sync_all()
    }

    fn to_toml(&self) -> String {
        let image = ChainImage { image: self.image.clone(), format: self.format, data_file: None };
        format!(
            "# The files of a disk, written by larder disk serve --pin-chain: no others are opened for it.\n{}",
            format_chain_journals(&image, &self.chain)
        )
    }
}

/// Reads a text file that only the caller or root can have written, and that is not a symbolic link.
fn read_trusted(path: &Path) -> io::Result<String> {
    let mut options = File::options();
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = options.read(true).custom_flags(flags).open(path);
    let file = file.map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => io::Error::new(
            io::ErrorKind::PermissionDenied,
            "it is a symbolic link, which another user may redirect; give the path of the file itself",
        ),
        _ => error,
    })?;
    let found = file.metadata()?;
    let user = rustix::process::geteuid().as_raw();
    let why = match found.uid() {
        _ if !found.is_file() => "it is not a regular file",
        owner if owner != 0 && owner != user => "it belongs to another user, who could make Larder open any file",
        _ if found.mode() & 0o022 != 0 => "other users may write to it, and could make Larder open any file",
        _ => "",
    };
    if !why.is_empty() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    let bytes = small_file::read_open(file, CONFIG_BYTES_MAX)?;
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

impl ConfigParser<'_> {
    fn parse_chain_file(&mut self, table: &DeTable<'_>) -> Option<ChainFile> {
        let directory = self.directory();
        let (mut image, mut format, mut chain) = (None, None, PinnedChain::default());
        for (key, value) in table {
            let (at, key) = (key.span(), key.get_ref().as_ref());
            match key {
                "image" => image = self.parse_value(key, value, |text| parse_image(&directory, text)),
                "format" => format = self.parse_value(key, value, parse_format),
                "data-file" => chain.data_file = self.parse_value(key, value, |text| parse_image(&directory, text)),
                "backing" => chain.backing = self.parse_backing(&directory, value),
                _ => self
                    .add_mistake(&at, format!("unknown key '{key}'; a chain has image, format, data-file and backing")),
            }
        }
        for key in ["image", "format"] {
            if !table.contains_key(key) {
                self.add_mistake(&(0..0), format!("there is no {key}; remove this file, and Larder writes a new one"));
            }
        }
        if format == Some(Format::Raw) {
            self.check_raw_chain(&(0..0), &chain);
        }
        Some(ChainFile { image: image?, format: format?, chain })
    }

    /// Parses the backing files of an image: an array of tables.
    pub(super) fn parse_backing(&mut self, directory: &Path, value: &Value<'_>) -> Vec<ChainImage> {
        let DeValue::Array(all) = value.get_ref() else {
            self.add_mistake(&value.span(), format!("backing: write {BACKING_EXAMPLE}"));
            return Vec::new();
        };
        let images: Vec<_> = all.iter().map(|value| self.parse_backing_image(directory, value)).collect();
        let images: Vec<ChainImage> = images.into_iter().flatten().collect();
        for (number, image) in images.iter().enumerate() {
            if image.format == Format::Raw && (image.data_file.is_some() || number + 1 < images.len()) {
                self.add_mistake(
                    &value.span(),
                    format!("backing: {} is raw, and a raw image refers to no other file", image.image),
                );
            }
        }
        images
    }

    /// Refuses other files in the chain of a raw image.
    pub(super) fn check_raw_chain(&mut self, at: &Range<usize>, chain: &PinnedChain) {
        if *chain != PinnedChain::default() {
            self.add_mistake(
                at,
                "a raw image refers to no other file: omit data-file and backing, or set format = \"qcow2\"",
            );
        }
    }

    fn parse_backing_image(&mut self, directory: &Path, value: &Value<'_>) -> Option<ChainImage> {
        let DeValue::Table(table) = value.get_ref() else {
            self.add_mistake(&value.span(), format!("backing: a backing file is a table, as in {BACKING_EXAMPLE}"));
            return None;
        };
        let (mut image, mut format, mut data_file) = (None, None, None);
        for (key, value) in table {
            let (at, key) = (key.span(), key.get_ref().as_ref());
            match key {
                "image" => image = self.parse_value(key, value, |text| parse_image(directory, text)),
                "data-file" => data_file = self.parse_value(key, value, |text| parse_image(directory, text)),
                "format" => format = self.parse_value(key, value, parse_format),
                _ => self
                    .add_mistake(&at, format!("unknown key '{key}'; a backing file has image, format and data-file")),
            }
        }
        for (key, is_present) in [("image", table.contains_key("image")), ("format", table.contains_key("format"))] {
            if !is_present {
                self.add_mistake(&value.span(), format!("this backing file has no {key}, as in {BACKING_EXAMPLE}"));
            }
        }
        Some(ChainImage { image: image?, format: format?, data_file })
    }
}
