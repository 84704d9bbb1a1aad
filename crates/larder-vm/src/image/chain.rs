//! An image and all the files that it refers to: its backing file, that one's, and so on, and external data files.

use std::rc::Rc;

use larder_block::backend::file::{HeldFile, OpenError, Role};
use larder_block::backend::image_lock::Claim;
use larder_block::filter::stay_raw::StayRaw;
use larder_block::{BlockDevice, BoxFuture, Loop};
use larder_qcow2::{OpenOptions, Others, Qcow2};

use super::cache_note::Note;
use super::disk_id::{self, DiskFile};
use super::journal::{self, Journals};
use super::needed;
use super::{
    Format, ImageAddress, ImageError, ImageOptions, begins_like, in_guest_blocks, open_export, open_file, recognise,
    refuse_dirty,
};

/// The longest chain of backing files.
const CHAIN_MAX: usize = 200;

/// An image that was opened as the disk that it describes.
pub(super) struct Opened {
    pub(super) device: Rc<dyn BlockDevice>,
    pub(super) format: Format,
    /// The files that it is in, outermost first, on this host.
    pub(super) files: Vec<DiskFile>,
    /// Part of it is on a block device or an NBD export: nothing tells when somebody has written to that.
    pub(super) lacks_times: bool,
}

/// Opens an image as the disk that it describes. The files of a trial are `held` from then on, also if it fails.
pub(super) async fn open(
    on: &Loop,
    image: &ImageAddress,
    options: &ImageOptions,
    held: &mut Vec<HeldFile>,
) -> Result<Opened, ImageError> {
    let mut opener = Opener {
        on,
        options,
        opened: Vec::new(),
        files: Vec::new(),
        held,
        is_past_server: false,
    };
    let (device, format) = opener
        .open(image, options.format, options.read_only, options.role.clone())
        .await?;
    Ok(Opened {
        device,
        format,
        lacks_times: opener.is_past_server || opener.files.iter().any(DiskFile::lacks_times),
        files: opener.files,
    })
}

/// One image of a chain as a disk, and what its bytes mean.
type Layer = (Rc<dyn BlockDevice>, Format);

struct Opener<'a> {
    on: &'a Loop,
    options: &'a ImageOptions,
    /// The images that led here, outermost first.
    opened: Vec<ImageAddress>,
    /// See [`Opened`].
    files: Vec<DiskFile>,
    held: &'a mut Vec<HeldFile>,
    /// An NBD server is in the chain so far. A trial ends there, so nobody has claimed for us what comes behind it.
    is_past_server: bool,
}

impl Opener<'_> {
    fn open<'a>(
        &'a mut self,
        image: &'a ImageAddress,
        format: Option<Format>,
        read_only: bool,
        role: Role,
    ) -> BoxFuture<'a, Result<Layer, ImageError>> {
        Box::pin(async move {
            if let (ImageAddress::Nbd(uri), true) = (image, self.options.trial) {
                return Err(ImageError::NotAsked { uri: uri.to_string() });
            }
            let is_guessed = format.is_none();
            let format = match format {
                Some(format) => format,
                None => probe(image)?,
            };
            if format == Format::Qcow2 && self.options.share && !read_only {
                return Err(ImageError::SharedWriter {
                    image: image.to_string(),
                });
            }
            let file = self.open_bytes(image, (format, is_guessed), read_only, role).await?;
            let device = match format {
                // Its guest must not make it what the next guess would be wrong about. NBD exports are never guessed.
                Format::Raw if is_guessed && !read_only && matches!(image, ImageAddress::Path(_)) => {
                    Rc::new(StayRaw::new(file, begins_like))
                }
                Format::Raw => file,
                Format::Qcow2 => {
                    self.opened.push(image.clone());
                    self.open_qcow2(image, file, read_only).await?
                }
            };
            Ok((device, format))
        })
    }

    async fn open_bytes(
        &mut self,
        image: &ImageAddress,
        (format, is_guessed): (Format, bool),
        read_only: bool,
        role: Role,
    ) -> Result<Rc<dyn BlockDevice>, ImageError> {
        let mut options = ImageOptions {
            read_only,
            role,
            ..self.options.clone()
        };
        if self.is_past_server {
            options.claim = Claim::Own;
        }
        let device = match image {
            ImageAddress::Path(path) => {
                let file = open_file(self.on, path, &options, format != Format::Raw).await?;
                // It is locked now, and nothing has been written.
                self.files.push(DiskFile::new(path, !read_only));
                if options.trial {
                    self.held.push(file.hold().map_err(|source| OpenError::Os {
                        path: path.clone(),
                        what: "keeping it open",
                        source,
                    })?);
                }
                file as Rc<dyn BlockDevice>
            }
            ImageAddress::Nbd(uri) => {
                self.is_past_server = true;
                open_export(self.on, uri, &options).await?
            }
        };
        let device = in_guest_blocks(device);
        if !read_only && format == Format::Raw {
            needed::refuse(image, &device, is_guessed).await?;
        }
        Ok(device)
    }

    async fn open_qcow2(
        &mut self,
        image: &ImageAddress,
        file: Rc<dyn BlockDevice>,
        read_only: bool,
    ) -> Result<Rc<dyn BlockDevice>, ImageError> {
        let header = larder_qcow2::read_header(&file).await.map_err(ImageError::Qcow2)?;
        let data_file = match (header.shape.data_file, &header.data_file) {
            (false, _) => None,
            (true, Some(name)) => Some(self.open_data_file(image, name, read_only).await?),
            (true, None) => {
                return Err(ImageError::NoDataFile {
                    image: image.to_string(),
                });
            }
        };
        let backing = match &header.backing_file {
            Some(name) => Some(self.open_backing(image, name, header.backing_format.as_deref()).await?),
            None => None,
        };
        if header.corrupt && !read_only {
            return Err(ImageError::Qcow2(larder_qcow2::OpenError::Header {
                name: image.to_string(),
                source: larder_qcow2::header::HeaderError::Corrupt,
            }));
        }
        let mut beside = None;
        let journals = match read_only || self.options.trial {
            true => {
                let is_backing = self.opened.len() > 1;
                // One that is shared may have a server.
                beside = match self.options.share {
                    true => None,
                    false => journal::look(image, &header, !read_only || is_backing)?,
                };
                Journals::default()
            }
            false => journal::open(image, &header)?,
        };
        let (left, file_of_left) = match journals.left {
            Some((file, left)) => (Some(left), Some(file)),
            None => (beside, None),
        };
        let options = OpenOptions {
            read_only: read_only || self.options.trial,
            journal: journals.own,
            left,
            metadata_memory: self.options.metadata_memory,
            ..OpenOptions::default()
        };
        let others = Others { backing, data_file };
        let opened = Qcow2::open(self.on, file, others, options).await;
        let opened = opened.map_err(ImageError::Qcow2)?;
        if let Some(file) = file_of_left {
            // The image has it. A journal that stays is not believed.
            let _ = std::fs::remove_file(file);
        }
        Ok(opened)
    }

    async fn open_data_file(
        &mut self,
        image: &ImageAddress,
        name: &str,
        read_only: bool,
    ) -> Result<Rc<dyn BlockDevice>, ImageError> {
        let failed = |source| ImageError::DataFile {
            image: image.to_string(),
            name: name.to_owned(),
            source: Box::new(source),
        };
        let address = ImageAddress::beside(image, name).map_err(|error| failed(error.into()))?;
        let opened = self.open(&address, Some(Format::Raw), read_only, Role::Part).await;
        opened.map(|(device, _)| device).map_err(failed)
    }

    async fn open_backing(
        &mut self,
        image: &ImageAddress,
        name: &str,
        format: Option<&str>,
    ) -> Result<Rc<dyn BlockDevice>, ImageError> {
        let refused = |why: String| ImageError::BackingName {
            image: image.to_string(),
            name: name.to_owned(),
            why,
        };
        let unknown = |why: String| ImageError::BackingUnknown {
            image: image.to_string(),
            name: name.to_owned(),
            why,
        };
        let format = match format.map(|name| (name, Format::of_driver(name))) {
            None => None,
            Some((_, Some(format))) => Some(format),
            Some((other, None)) => {
                return Err(unknown(format!("has the format '{other}', which Larder does not know")));
            }
        };
        let address =
            ImageAddress::beside(image, name).map_err(|error| unknown(format!("cannot be opened: {error}")))?;
        if self.opened.iter().any(|opened| is_same(opened, &address)) {
            return Err(refused("leads back to an image of the same chain".to_owned()));
        }
        if self.opened.len() >= CHAIN_MAX {
            return Err(unknown(format!("would be the {CHAIN_MAX}th of a chain")));
        }
        let opened = self.open(&address, format, true, Role::Part).await;
        let (device, format) = opened.map_err(|source| match source {
            // The innermost failure says it all.
            source @ (ImageError::Backing { .. }
            | ImageError::BackingName { .. }
            | ImageError::BackingUnknown { .. }) => source,
            source => ImageError::Backing {
                image: image.to_string(),
                name: name.to_owned(),
                source: Box::new(source),
            },
        })?;
        if !self.options.trial {
            // What is newer than it is in its cache, and nobody would read it.
            let others = Note::others(&disk_id::identity(&address, format), &[]);
            refuse_dirty(self.on, &address, &others).await?;
        }
        Ok(device)
    }
}

/// The format of an image that nobody has named: what a file or block device begins like. NBD exports are raw.
///
/// # Errors
/// It is one that Larder does not know.
pub fn probe(image: &ImageAddress) -> Result<Format, ImageError> {
    let found = match image {
        ImageAddress::Path(path) => recognise(path),
        ImageAddress::Nbd(_) => None,
    };
    match found {
        None => Ok(Format::Raw),
        Some("qcow2") => Ok(Format::Qcow2),
        Some(format) => Err(ImageError::OtherFormat {
            image: image.to_string(),
            format,
        }),
    }
}

/// Whether both lead to the same file.
pub fn is_same(one: &ImageAddress, other: &ImageAddress) -> bool {
    match (one, other) {
        (ImageAddress::Path(one), ImageAddress::Path(other)) => match (one.canonicalize(), other.canonicalize()) {
            (Ok(one), Ok(other)) => one == other,
            _ => one == other,
        },
        (one, other) => one == other,
    }
}
