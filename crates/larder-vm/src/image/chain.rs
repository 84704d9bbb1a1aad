//! An image and all the files that it refers to: its backing file, that one's, and so on, and external data files.
//!
//! Which those are is up to the [`policy::ChainPolicy`]: headers name files, and whoever made an image has chosen the names.

pub(super) mod policy;

use std::os::fd::AsFd;
use std::rc::Rc;

use larder_block::backend::file::{HeldFile, OpenError, Role};
use larder_block::backend::image_lock::Claim;
use larder_block::filter::stay_raw::StayRaw;
use larder_block::opener::{self, opener};
use larder_block::{BlockDevice, BoxFuture, Loop};
use larder_qcow2::{MetadataMemory, OpenOptions, Others, Qcow2};

use super::cache_note::Note;
use super::disk_id::{self, DiskFile};
use super::journal::{self, Journals};
use super::needed;
use super::proof::{self, Proof};
use super::{
    Format, ImageAddress, ImageError, ImageOptions, begins_like, in_guest_blocks, open_export, open_file, recognise,
    refuse_dirty,
};
use policy::{Author, ChainPolicy, Named, NamedChain, NamedImage, PinnedBy};

/// The longest chain of backing files.
const CHAIN_MAX: usize = 200;

/// An image that was opened as the disk that it describes.
pub(super) struct Opened {
    pub(super) device: Rc<dyn BlockDevice>,
    pub(super) format: Format,
    /// The files that it is in, outermost first, on this host.
    pub(super) files: Vec<DiskFile>,
    /// All of them, with those of NBD servers.
    pub(super) parts: Vec<ChainPart>,
    /// What tells of the files whether somebody else has written to them.
    pub(super) proof: Proof,
    /// Part of it is on a block device or an NBD export: no file's times tell when somebody has written to that.
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
        proof: Proof::default(),
        parts: Vec::new(),
        held,
        metadata_memory: MetadataMemory::new(options.metadata_memory),
        is_past_server: false,
    };
    let (device, format) = opener
        .open(
            image,
            options.format,
            options.read_only,
            (options.role.clone(), PartRole::Image),
        )
        .await?;
    Ok(Opened {
        device,
        format,
        lacks_times: opener.is_past_server || opener.files.iter().any(DiskFile::lacks_times),
        files: opener.files,
        proof: opener.proof,
        parts: opener.parts,
    })
}

/// A file that was opened for a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainPart {
    /// Where it is.
    pub image: ImageAddress,
    /// What its bytes mean.
    pub format: Format,
    /// What it is to the image that names it.
    pub role: PartRole,
    /// Whether it may be written.
    pub writable: bool,
}

/// What a file of a chain is to the image that names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartRole {
    /// It is the image that was asked for.
    Image,
    /// Its external data file.
    DataFile,
    /// Its backing file.
    Backing,
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
    proof: Proof,
    parts: Vec<ChainPart>,
    held: &'a mut Vec<HeldFile>,
    metadata_memory: Rc<MetadataMemory>,
    /// An NBD server is in the chain so far. A trial ends there, so nobody has claimed for us what comes behind it.
    is_past_server: bool,
}

impl Opener<'_> {
    fn open<'a>(
        &'a mut self,
        image: &'a ImageAddress,
        format: Option<Format>,
        read_only: bool,
        (role, part): (Role, PartRole),
    ) -> BoxFuture<'a, Result<Layer, ImageError>> {
        Box::pin(async move {
            if let (ImageAddress::Nbd(uri), true) = (image, self.options.trial) {
                return Err(ImageError::NotAsked { uri: uri.to_string() });
            }
            let is_guessed = format.is_none();
            let format = match format {
                Some(format) => format,
                None => match &self.options.chain {
                    // A guest could write what another format begins with.
                    ChainPolicy::Pinned {
                        by: PinnedBy::VmFile, ..
                    } => return Err(no_format(image)),
                    _ => probe(image)?,
                },
            };
            if format == Format::Qcow2 && self.options.share && !read_only {
                return Err(ImageError::SharedWriter {
                    image: image.to_string(),
                });
            }
            let (file, author) = self.open_bytes(image, (format, is_guessed), read_only, role).await?;
            self.parts.push(ChainPart {
                image: image.clone(),
                format,
                role: part,
                writable: !read_only,
            });
            let device = match format {
                // Its guest must not make it what the next guess would be wrong about. NBD exports are never guessed.
                Format::Raw if is_guessed && !read_only && matches!(image, ImageAddress::Path(_)) => {
                    Rc::new(StayRaw::new(file, begins_like))
                }
                Format::Raw => file,
                Format::Qcow2 => {
                    self.opened.push(image.clone());
                    self.open_qcow2((image, author), file, read_only).await?
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
    ) -> Result<(Rc<dyn BlockDevice>, Author), ImageError> {
        let mut options = ImageOptions {
            read_only,
            role,
            ..self.options.clone()
        };
        if self.is_past_server {
            options.claim = Claim::Own;
        }
        let (device, author) = match image {
            ImageAddress::Path(path) => {
                let marks = (options.cache.is_some() && !options.trial).then(proof::marks_folder);
                let file = open_file(self.on, path, &options, format != Format::Raw, marks).await?;
                let found = file.metadata().map_err(|source| OpenError::Os {
                    path: path.clone(),
                    what: "finding whose it is",
                    source,
                })?;
                let author = Author::of_file(&found, is_guessed);
                // It is locked now, and nothing has been written.
                self.files.push(DiskFile::new(file.as_fd(), path, !read_only));
                self.proof.add_file(&file);
                if options.trial {
                    self.held.push(file.hold().map_err(|source| OpenError::Os {
                        path: path.clone(),
                        what: "keeping it open",
                        source,
                    })?);
                }
                (file as Rc<dyn BlockDevice>, author)
            }
            ImageAddress::Nbd(uri) => {
                self.is_past_server = true;
                self.proof.add_export();
                let export = open_export(self.on, uri, &options).await?;
                (export as Rc<dyn BlockDevice>, Author::Server)
            }
        };
        let device = in_guest_blocks(device);
        if !read_only && format == Format::Raw {
            needed::refuse(image, &device, is_guessed).await?;
        }
        Ok((device, author))
    }

    async fn open_qcow2(
        &mut self,
        (image, author): (&ImageAddress, Author),
        file: Rc<dyn BlockDevice>,
        read_only: bool,
    ) -> Result<Rc<dyn BlockDevice>, ImageError> {
        let header = larder_qcow2::read_header(&file).await.map_err(ImageError::Qcow2)?;
        let data_file = match (header.shape.data_file, &header.data_file) {
            (true, None) => {
                return Err(ImageError::NoDataFile {
                    image: image.to_string(),
                });
            }
            (is_there, name) => {
                let name = name.as_deref().filter(|_| is_there);
                self.open_data_file((image, author), name, read_only).await?
            }
        };
        let named = header.backing_file.as_deref();
        let backing = self
            .open_backing((image, author), named, header.backing_format.as_deref())
            .await?;
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
            metadata_memory: Rc::clone(&self.metadata_memory),
            ..OpenOptions::default()
        };
        let others = Others { backing, data_file };
        let opened = Qcow2::open(self.on, file, others, options).await;
        let opened = opened.map_err(ImageError::Qcow2)?;
        if let Some(file) = file_of_left {
            // The image has it. A journal that stays is not believed.
            let _ = opener().remove(&file);
        }
        Ok(opened)
    }

    /// How many images lead to the one that was pushed last.
    fn depth(&self) -> usize {
        self.opened.len().saturating_sub(1)
    }

    async fn open_data_file(
        &mut self,
        (image, author): (&ImageAddress, Author),
        name: Option<&str>,
        read_only: bool,
    ) -> Result<Option<Rc<dyn BlockDevice>>, ImageError> {
        let failed = |name: &str, source| ImageError::DataFile {
            image: image.to_string(),
            name: name.to_owned(),
            source: Box::new(source),
        };
        let named = name.map(|name| {
            let address = ImageAddress::beside(image, name).map_err(|error| failed(name, error.into()))?;
            Ok::<_, ImageError>(Named {
                name,
                address,
                format: Some(Format::Raw),
            })
        });
        let allowed = self
            .options
            .chain
            .data_file((image, author), self.depth(), named.transpose()?)?;
        let Some(address) = allowed else { return Ok(None) };
        let role = (Role::Part, PartRole::DataFile);
        let opened = self.open(&address, Some(Format::Raw), read_only, role).await;
        let opened = opened.map_err(|source| failed(&address.to_string(), source));
        opened.map(|(device, _)| Some(device))
    }

    async fn open_backing(
        &mut self,
        (image, author): (&ImageAddress, Author),
        name: Option<&str>,
        format: Option<&str>,
    ) -> Result<Option<Rc<dyn BlockDevice>>, ImageError> {
        let named = name.map(|name| named_backing(image, name, format)).transpose()?;
        let name = name.unwrap_or_default();
        let allowed = self.options.chain.backing((image, author), self.depth(), named)?;
        let Some((address, format)) = allowed else {
            return Ok(None);
        };
        if self.opened.iter().any(|opened| is_same(opened, &address)) {
            return Err(ImageError::BackingName {
                image: image.to_string(),
                name: name.to_owned(),
                why: "leads back to an image of the same chain".to_owned(),
            });
        }
        if self.opened.len() >= CHAIN_MAX {
            return Err(ImageError::BackingUnknown {
                image: image.to_string(),
                name: name.to_owned(),
                why: format!("would be the {CHAIN_MAX}th of a chain"),
            });
        }
        let role = (Role::Part, PartRole::Backing);
        let opened = self.open(&address, format, true, role).await;
        let (device, format) = opened.map_err(|source| match source {
            // The innermost failure says it all.
            source @ (ImageError::Backing { .. }
            | ImageError::BackingName { .. }
            | ImageError::BackingUnknown { .. }
            | ImageError::Chain(_)) => source,
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
        Ok(Some(device))
    }
}

/// The backing file that a header names, if Larder can open what has such a name.
fn named_backing<'a>(image: &ImageAddress, name: &'a str, format: Option<&str>) -> Result<Named<'a>, ImageError> {
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
    let address = ImageAddress::beside(image, name).map_err(|error| unknown(format!("cannot be opened: {error}")))?;
    Ok(Named { name, address, format })
}

fn no_format(image: &ImageAddress) -> ImageError {
    // Of a file that is not there nothing can be said.
    let found = match image {
        ImageAddress::Path(path) if opener::metadata(path).is_err() => None,
        image => probe(image).ok(),
    };
    ImageError::NoFormat {
        image: image.to_string(),
        found: match found {
            Some(found) => format!("\"{}\", which is what the image begins like now,", found.name()),
            None => "\"raw\" or \"qcow2\"".to_owned(),
        },
    }
}

/// Returns the files that the headers of an image and of its backing files name. Only headers of files on this host are read: no
/// NBD server is connected to, and what a backing file without a format is, is not guessed.
///
/// # Errors
/// One of them cannot be read, or its header cannot.
pub async fn named_chain(on: &Loop, image: &ImageAddress, format: Format) -> Result<NamedChain, ImageError> {
    let mut chain = NamedChain::default();
    let (mut above, mut format, mut role) = (image.clone(), Some(format), Role::Image);
    while let (ImageAddress::Path(path), Some(Format::Qcow2)) = (&above, format) {
        let options = ImageOptions {
            read_only: true,
            share: true,
            role,
            ..ImageOptions::default()
        };
        let file: Rc<dyn BlockDevice> = open_file(on, path, &options, true, None).await?;
        let header = larder_qcow2::read_header(&in_guest_blocks(file)).await;
        let header = header.map_err(ImageError::Qcow2)?;
        if let Some(name) = header.data_file.as_deref().filter(|_| header.shape.data_file) {
            let data_file = Some(ImageAddress::beside(&above, name)?.absolute());
            match chain.backing.last_mut() {
                Some(backing) => backing.data_file = data_file,
                None => chain.data_file = data_file,
            }
        }
        let Some(name) = header.backing_file.as_deref() else {
            break;
        };
        let named = named_backing(&above, name, header.backing_format.as_deref())?;
        if chain.backing.len() >= CHAIN_MAX {
            return Err(ImageError::BackingUnknown {
                image: above.to_string(),
                name: name.to_owned(),
                why: format!("would be the {CHAIN_MAX}th of a chain"),
            });
        }
        (above, format, role) = (named.address.absolute(), named.format, Role::Part);
        chain.backing.push(NamedImage {
            image: above.clone(),
            format,
            data_file: None,
        });
    }
    Ok(chain)
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
        (one, other) if one == other => true,
        (ImageAddress::Path(one), ImageAddress::Path(other)) => {
            match (opener().canonical(one), opener().canonical(other)) {
                (Ok(one), Ok(other)) => one == other,
                _ => false,
            }
        }
        _ => false,
    }
}
